"""Units that work beside the threads on Hopper and Blackwell: copies of boxes, products, their barriers."""
