"""What training optimises: anchors and their labels, label weights, and losses computed in chunks."""
