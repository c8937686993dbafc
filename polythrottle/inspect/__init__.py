"""What is here: the doctor's examination of a machine, snapshots of boards, and descriptions of models."""
