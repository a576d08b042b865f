"""How a store of an older version becomes one of this version.

Run by `broker_server.store.opening`.

To change the schema: store a fixture of the present version (see
``tests/broker_server/fixtures/README.md``), change the record and the ``SCHEMA_VERSION`` of
`broker_server.store.schema`, and add ``versions/v<number>_<what>.py`` whose ``upgrade`` does the
same to a database that exists. A test compares the two. What a column holds as JSON belongs to the
schema as well: a key that is renamed or no longer known needs a version that rewrites the rows.
"""
