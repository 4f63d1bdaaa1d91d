"""The product of many sorted rows on Hopper, in Gluon: kernel and plan."""
