"""`tritoncp autotune`: measure tile shapes, and write down the shapes that beat the rule."""
