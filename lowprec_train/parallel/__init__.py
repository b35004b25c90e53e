"""Many processes as one: a mesh, tensor parallel as small styles, data parallel as `fully_shard`, parts as data."""
