"""polythrottle: the least energy at which a neural network serves its users within their latency limit."""
