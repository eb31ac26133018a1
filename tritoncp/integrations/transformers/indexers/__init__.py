"""Choice of keys for attention layers with an indexer, by tiles, where the indexers of transformers store the
scores of all pairs."""
