"""The portable product of rows with their experts' matrices, the order of its rows, and the sum of its results."""
