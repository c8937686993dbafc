"""Values: what is asked, tried, measured and answered; no I/O, and no third party but numpy."""
