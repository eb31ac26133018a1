"""The balancer that minimises remote keys under even work and even numbers of blocks.

Blocks lie on a circle. Ranks choose in turn: each takes two windows of the circle, one of which holds the
costliest free block, such that the two have the rank's share of blocks and work and see the fewest keys; its
blocks then leave the circle. Swaps of two blocks between ranks afterwards even out the work and save keys.

A long sequence is first placed in pieces of several blocks: the time hardly grows with its length. Very many
ranks are placed in groups first, and the blocks of each group on its ranks.
"""
