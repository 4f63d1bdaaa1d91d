"""The sum of small arrays over the devices of one process, in one launch: kernel and plan."""
