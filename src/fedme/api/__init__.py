"""FedMe in Python: clients with their own samples and networks in, personal models out. The same runner as the command line."""
