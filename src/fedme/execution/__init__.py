"""What runs methods: one operation alone, and all clients of a cohort in one process."""
