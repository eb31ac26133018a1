"""Adapters for the libraries that call attention: one package for each library, which it imports.

May import: every package of the spine, `api` and below.
"""
