"""The numbers of effort that are weakened, and the cases they are tried on."""
