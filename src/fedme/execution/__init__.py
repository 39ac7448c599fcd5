"""Executes operations: the backends, the routes to them, and the lockstep of many clients."""
