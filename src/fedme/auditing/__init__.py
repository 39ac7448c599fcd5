"""A membership-inference audit: can those who see a client's models tell which samples it trained on?"""
