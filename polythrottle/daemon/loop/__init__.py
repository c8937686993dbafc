"""The control loop: it observes, lets the controller decide, carries out what it says, and answers commands."""
