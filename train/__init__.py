"""What composes: the LightningModules, the command lines, export."""
