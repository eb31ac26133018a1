"""How K and V reach the queries: each schedule is a forward/backward pair of generators."""
