"""The balancer that minimises remote keys under even work and even numbers of blocks.

Blocks lie on a circle. Ranks choose in turn: each takes two windows of the circle, one of which holds the
costliest free block, such that the two have the rank's share of blocks and work and see the fewest keys; its
blocks then leave the circle. At last blocks are swapped where a rank has more work than counts as even.

A long sequence is placed in pieces of several blocks: the time hardly grows with its length.
"""
