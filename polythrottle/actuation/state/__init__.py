"""What the state folder holds of one device: the record of originals, the lease, and the place of both."""
