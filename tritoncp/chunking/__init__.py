"""Graph chunking: training graphs cut by batch or sequence, and ordered so that communication hides.

May import: everything up to `api`.
"""
