"""Adapters for other libraries, transformers and torchtitan: one module or package each, which imports it.

May import: `api` and every layer below.
"""
