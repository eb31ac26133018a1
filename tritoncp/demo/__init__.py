"""The demo: a small byte-level transformer trained on several ranks and on one, compared step by step.

corpus.py    source files of the standard library -> documents packed into windows
model.py     the transformer, with the attention function as an argument
train.py     the training loop, for one rank and for several local processes
run.py       both runs, from their options to the picture, the tables and the verdict
command.py   the command `tritoncp demo`
"""
