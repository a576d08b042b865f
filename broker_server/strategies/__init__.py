"""The methods, one file per paper; `registry` has a row for each."""
