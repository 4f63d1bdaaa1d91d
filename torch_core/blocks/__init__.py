"""What is done to blocks of the paged cache."""
