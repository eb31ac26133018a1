"""`tritoncp autotune`: measure tile shapes, and keep those that win."""
