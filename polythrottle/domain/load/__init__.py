"""The load along time: what the next seconds bring, and what may be drawn so that energy lasts."""
