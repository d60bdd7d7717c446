"""The options of planning: values as users give them come in, checked options go out."""
