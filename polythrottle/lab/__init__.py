"""Research with polythrottle: how good its searches are, and the papers' figures beside its own."""
