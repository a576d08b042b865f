"""One file for every version of the schema, each the step from the version before it."""
