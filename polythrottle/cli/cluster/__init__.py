"""``polythrottle cluster``: training on machines that can be taken away."""
