"""Studies of planning, run by hand: balance of the balancers, and scaling to many ranks."""
