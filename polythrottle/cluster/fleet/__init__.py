"""What the nodes of a fleet learn from each other, what each may spend on learning, and how fast each should run."""
