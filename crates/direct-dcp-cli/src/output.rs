//! Writing a safetensors file that appears whole or not at all.

use crate::error::{Error, plain};
use crate::tensor_file::{Tensor, same_file};
use serde_json::{Map, Value, json};
use std::fs::{self, OpenOptions, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file in the making, beside the place where it will appear. It is removed if dropped.
#[derive(Debug)]
pub(crate) struct Output {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    missing: usize,
}

impl Output {
    /// Checks that `path` can be written, and writes the header of a file that holds `tensor`.
    pub(crate) fn create(path: &Path, tensor: &Tensor) -> Result<Output, Error> {
        let fail = |why: &str| Error::Failed(format!("output {}: {why}", path.display()));
        let system = |error| fail(&plain(&error));
        let mut target = path.to_path_buf();
        if let Ok(found) = fs::metadata(path) {
            if found.is_dir() {
                return Err(fail("is a directory; name a file"));
            }
            if !found.is_file() {
                return Err(fail("exists and is not a regular file"));
            }
            if same_file(path, &tensor.data.path()) {
                return Err(fail("is the input itself; name another file"));
            }
            // Renaming would replace a read-only file without asking.
            OpenOptions::new().write(true).open(path).map_err(system)?;
            // What a link points to is replaced, not the link.
            target = fs::canonicalize(path).map_err(system)?;
        }
        if target.file_name().is_none() {
            return Err(fail("is no file name"));
        }
        let dir = match target.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new()
            .prefix(".direct-dcp-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .map_err(|error| fail(&format!("cannot write in its directory: {}", plain(&error))))?;
        let mut output = Output {
            path: target,
            file: BufWriter::new(file),
            missing: tensor.bytes(),
        };
        let header = header(tensor);
        output.put(&(header.len() as u64).to_le_bytes())?;
        output.put(&header)?;
        Ok(output)
    }

    /// The next bytes of the tensor.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.missing = self
            .missing
            .checked_sub(bytes.len())
            .ok_or_else(|| self.fail("more rows came than the tensor has"))?;
        self.put(bytes)
    }

    /// Makes the file appear.
    pub(crate) fn finish(self) -> Result<PathBuf, Error> {
        if self.missing > 0 {
            return Err(self.fail("fewer rows came than the tensor has"));
        }
        let Output { path, file, .. } = self;
        let fail = |error| Error::Failed(format!("output {}: {}", path.display(), plain(&error)));
        let file = file
            .into_inner()
            .map_err(|error| fail(error.into_error()))?;
        file.as_file().sync_all().map_err(fail)?;
        file.persist(&path).map_err(|error| fail(error.error))?;
        Ok(path)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let done = self.file.write_all(bytes);
        done.map_err(|error| self.fail(&plain(&error)))
    }

    fn fail(&self, why: &str) -> Error {
        Error::Failed(format!("output {}: {why}", self.path.display()))
    }
}

fn header(tensor: &Tensor) -> Vec<u8> {
    let mut header = Map::new();
    if let Some(notes) = &tensor.notes {
        header.insert("__metadata__".into(), json!(notes));
    }
    header.insert(
        tensor.name.clone(),
        json!({
            "dtype": tensor.dtype,
            "shape": [tensor.rows, tensor.dim],
            "data_offsets": [0, tensor.bytes()],
        }),
    );
    let mut bytes = Value::Object(header).to_string().into_bytes();
    // The data starts at a multiple of 8, as the format wants.
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    bytes
}
