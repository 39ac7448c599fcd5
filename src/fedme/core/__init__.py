"""Values and seams: keys, models, data, a client's operations, the shape of a method."""
