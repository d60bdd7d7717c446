"""Plans of public models as the configurations of other projects."""
