//! Reading one two-dimensional tensor of a safetensors file, without trusting the file.

use crate::error::{Error, plain};
use direct_dcp::{DType, RowFormat};
use safetensors::tensor::{Dtype, Metadata};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The largest header, as the format's own library has it.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes that are read at a time.
const CHUNK: usize = 4 << 20;

/// What a header says about the tensor, checked against the file.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    /// The file's notes, which go with the tensor wherever it goes.
    pub(crate) notes: Option<HashMap<String, String>>,
    /// Where its bytes are.
    pub(crate) data: RowSource,
}

/// Rows of equal length in a file, as a rank is told of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RowSource {
    /// The path's bytes, which need not be text.
    path: Vec<u8>,
    offset: u64,
    rows: usize,
    row_bytes: usize,
}

impl Tensor {
    /// Reads the header of `path` and finds the tensor `name`.
    pub(crate) fn open(path: &Path, name: &str) -> Result<Tensor, Error> {
        let (metadata, data_start) =
            read_header(path).map_err(|why| format!("{}: {why}", path.display()))?;
        let fail = |why: String| Error::Failed(format!("{}: {why}", path.display()));
        let Some(info) = metadata.info(name) else {
            return Err(fail(format!("no tensor {name:?}; {}", listed(&metadata))));
        };
        let shape = &info.shape;
        let &[rows, dim] = shape.as_slice() else {
            return Err(fail(format!(
                "tensor {name:?} has the shape {shape:?}, and a gather takes 2-dimensional ones, \
                 [rows, dim]; choose one with --tensor, or reshape it"
            )));
        };
        if rows == 0 || dim == 0 {
            return Err(fail(format!(
                "tensor {name:?} is empty: its shape is {shape:?}, with zero {}",
                if rows == 0 { "rows" } else { "columns" }
            )));
        }
        let dtype = library_dtype(info.dtype).ok_or_else(|| {
            fail(format!(
                "tensor {name:?} has the unsupported dtype {}; supported are F16, BF16, F8_E4M3, \
                 U8 and I8",
                info.dtype
            ))
        })?;
        let (begin, end) = info.data_offsets;
        // Whole rows: the header was checked against shape and dtype.
        let row_bytes = (end - begin) / rows;
        debug_assert_eq!(row_bytes, RowFormat::new(dtype, dim).row_bytes());
        let path = fs::canonicalize(path).map_err(Error::io(path.display()))?;
        Ok(Tensor {
            name: name.to_string(),
            dtype: info.dtype,
            rows,
            dim,
            notes: metadata.metadata().clone(),
            data: RowSource {
                path: path.into_os_string().into_vec(),
                offset: data_start + begin as u64,
                rows,
                row_bytes,
            },
        })
    }

    /// The rows in the library's terms.
    pub(crate) fn format(&self) -> RowFormat {
        // Checked where the file was opened.
        RowFormat::new(library_dtype(self.dtype).unwrap_or(DType::Bytes), self.dim)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data.rows * self.data.row_bytes
    }
}

impl RowSource {
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(OsString::from_vec(self.path.clone()))
    }

    /// Reads all rows in order and passes them on some at a time: the first one's number, and
    /// whole rows.
    pub(crate) fn each_chunk<E: From<String>>(
        &self,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = self.path();
        let fail = |error| E::from(format!("{}: {}", path.display(), plain(&error)));
        let file = File::open(&path).map_err(fail)?;
        let per_chunk = (CHUNK / self.row_bytes).clamp(1, self.rows);
        let mut buffer = vec![0; per_chunk * self.row_bytes];
        for row in (0..self.rows).step_by(per_chunk) {
            let bytes = per_chunk.min(self.rows - row) * self.row_bytes;
            let chunk = &mut buffer[..bytes];
            let offset = self.offset + (row * self.row_bytes) as u64;
            file.read_exact_at(chunk, offset).map_err(fail)?;
            take(row, chunk)?;
        }
        Ok(())
    }
}

/// The header, and where the data starts.
fn read_header(path: &Path) -> Result<(Metadata, u64), String> {
    // Before opening, which would wait for a writer of a pipe.
    let kind = fs::metadata(path).map_err(|error| plain(&error))?;
    if kind.is_dir() {
        return Err("is a directory; name a safetensors file".into());
    }
    if !kind.is_file() {
        return Err("is not a regular file; copy it into one first".into());
    }
    let broken = |why: String| format!("not a safetensors file: {why}");
    let mut file = File::open(path).map_err(|error| plain(&error))?;
    let len = file.metadata().map_err(|error| plain(&error))?.len();
    if len < 8 {
        return Err(broken(format!("it is {len} bytes long")));
    }
    let mut word = [0; 8];
    file.read_exact(&mut word).map_err(|error| plain(&error))?;
    let header_len = u64::from_le_bytes(word);
    if header_len > MAX_HEADER {
        return Err(broken(format!(
            "it declares a header of {header_len} bytes, and 100 MB is the limit"
        )));
    }
    let data_start = 8 + header_len;
    if data_start > len {
        return Err(broken(format!(
            "truncated: it declares a header of {header_len} bytes, and the file has {len} in all"
        )));
    }
    // At most 100 MB.
    let mut header = vec![0; header_len as usize];
    file.read_exact(&mut header)
        .map_err(|error| plain(&error))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| broken(format!("its header is invalid: {error}")))?;
    let declared = metadata.data_len() as u64;
    let present = len - data_start;
    match declared.cmp(&present) {
        std::cmp::Ordering::Equal => Ok((metadata, data_start)),
        std::cmp::Ordering::Greater => Err(broken(format!(
            "truncated: its tensors end at byte {declared} of the data, and {present} are there"
        ))),
        std::cmp::Ordering::Less => Err(broken(format!(
            "{} bytes follow its last tensor",
            present - declared
        ))),
    }
}

/// How the library calls the elements; none for those it does not gather.
fn library_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F8_E4M3 => Some(DType::F8E4M3),
        Dtype::U8 | Dtype::I8 => Some(DType::Bytes),
        _ => None,
    }
}

/// The tensors of a file, in a sentence and not too many.
fn listed(metadata: &Metadata) -> String {
    const MOST: usize = 12;
    let mut names: Vec<String> = metadata.tensors().into_keys().collect();
    names.sort_unstable();
    if names.is_empty() {
        return "the file has none".into();
    }
    let shown: Vec<&str> = names.iter().take(MOST).map(String::as_str).collect();
    let more = names.len() - shown.len();
    match more {
        0 => format!("the file has {}", shown.join(", ")),
        _ => format!("the file has {} and {more} more", shown.join(", ")),
    }
}

/// Whether two paths name one file.
pub(crate) fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => a.as_os_str().as_bytes() == b.as_os_str().as_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::Tensor;
    use crate::error::Error;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};
    use std::io::Write;

    /// What `open` makes of a file with these bytes.
    fn open(bytes: &[u8]) -> Result<Tensor, Error> {
        let mut file = tempfile::NamedTempFile::new().map_err(Error::io("temporary file"))?;
        file.write_all(bytes).map_err(Error::io("temporary file"))?;
        Tensor::open(file.path(), "kv")
    }

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + data, 7);
        file
    }

    proptest! {
        /// Whatever a header says: no panic, and what is accepted lies in the file.
        #[test]
        fn a_changed_file_is_refused_or_consistent(
            changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..4),
            cut in any::<Index>(),
            cuts in any::<bool>(),
        ) {
            let header = r#"{"kv":{"dtype":"F16","shape":[4,3],"data_offsets":[0,24]}}"#;
            let mut bytes = file(header, 24);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if cuts {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(tensor) = open(&bytes) {
                prop_assert_eq!(tensor.format().row_bytes(), tensor.data.row_bytes());
                let end = tensor.data.offset + tensor.bytes() as u64;
                prop_assert!(end <= bytes.len() as u64);
            }
        }

        #[test]
        fn odd_numbers_are_refused_or_consistent(
            shape in prop::collection::vec(number(), 0..4),
            begin in number(),
            end in number(),
            data in 0_usize..64,
        ) {
            let header = format!(
                r#"{{"kv":{{"dtype":"F16","shape":{shape:?},"data_offsets":[{begin},{end}]}}}}"#
            );
            if let Ok(tensor) = open(&file(&header, data)) {
                prop_assert_eq!(tensor.bytes(), data);
                prop_assert_eq!(shape, [tensor.rows as u64, tensor.dim as u64]);
            }
        }
    }

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            0_u64..9,
            select(vec![
                u64::MAX,
                u64::MAX - 1,
                1 << 63,
                (1 << 61) - 1,
                1 << 32,
                12,
                16,
                24
            ]),
        ]
    }
}
