"""Compare two operating points in turns, with a test that may be looked at after every pair.

Names are imported from the modules, for the daemon needs the test alone and is to load no more.
"""
