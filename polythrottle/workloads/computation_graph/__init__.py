"""What a model computes and moves, counted from the model itself."""
