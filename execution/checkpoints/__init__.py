"""What a run keeps and goes on from: saving, loading, manifests, files of tensors, folders."""
