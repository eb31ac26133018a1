"""The demo: a small byte-level transformer trained on several ranks and on one, compared step by step.

corpus.py    source files of the standard library -> documents packed into windows
model.py     the transformer; attention is an argument of its calls
train.py     the training loop, the same for one rank and for many
ranks.py     local processes that train together
run.py       both runs, from their options to the picture, the tables and the verdict
command.py   the command `tritoncp demo`
"""
