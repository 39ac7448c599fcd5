"""What methods are made of: objectives, local steps, clusters, exchange, schedules."""
