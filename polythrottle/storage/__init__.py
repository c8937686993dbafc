"""Where things are kept and how they are read: paths, files that somebody else wrote, tables, and the journal."""
