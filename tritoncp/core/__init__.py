"""Helpers without knowledge of attention: uploads, handles, host copies, tracing, safe JSON and paths.

May import: nothing of the package.
"""
