"""What `make attack` tries: attacks on a real federation on loopback, by a server, by a site and by an outsider."""
