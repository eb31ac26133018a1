"""The balancer "locality": the fewest remote keys, for even work and equally many blocks on each rank.

The blocks form a circle. Ranks choose one after the other: each gets two windows of the circle, one of them
with the costliest free block, which together have the rank's share of blocks and work and see the fewest
keys. The blocks are then removed from the circle. In the end, blocks are swapped until the work is even.

A long sequence is placed in pieces of several blocks: the time hardly grows with its length.
"""
