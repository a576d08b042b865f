"""Many virtual devices without a network, and the data they share: data sets and partitions."""
