"""Helpers without knowledge of attention: uploads, handles, host copies, tracing and paths.

May import: nothing of the package.
"""
