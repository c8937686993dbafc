"""A proxy in front of a language model's server: it bounds the requests in flight, at run time, and streams answers."""
