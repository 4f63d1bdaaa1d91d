"""The product of many rows with gates on Hopper, in Gluon: kernel and plan."""
