//! Tensors from and to safetensors files.
//!
//! A result has the input's names, shapes, types and order, so its header is the input's header, byte for byte, and
//! only the data differ. Data go straight from the file into one vector for each tensor: nothing is held twice.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use paatp_transport::{Tensor, Values};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use sha2::{Digest, Sha256};
use thiserror::Error;

/// Longest header, in bytes: the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: usize = 8;

/// A tensor file cannot be used.
#[derive(Debug, Error)]
pub enum TensorError {
    /// It cannot be read.
    #[error("cannot read {path}; check path and permissions")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no safetensors file.
    #[error("{path} is no valid safetensors file: {detail}; write it with safetensors' save_file")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A tensor has a type that cannot be reduced.
    #[error(
        "tensor `{tensor}` in {path} has type {dtype:?}; F32, F16, BF16 and I32 are supported: convert it or leave it out"
    )]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// The result cannot be written.
    #[error("cannot write {path}; check that its folder exists, may be written to and has room")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A result differs in shape from what was asked for.
    #[error(
        "the result does not have the tensors of the input: {0}; this is a defect of paatp, please report it"
    )]
    Shape(String),
}

/// One tensor's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    elements: usize,
}

/// What a file holds besides the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length and header as in the file.
    header: Vec<u8>,
    /// In the order of the data.
    entries: Vec<Entry>,
}

impl Layout {
    /// Number of tensors.
    #[must_use]
    pub fn tensors(&self) -> usize {
        self.entries.len()
    }

    /// Elements of all tensors.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.entries.iter().map(|entry| entry.elements as u64).sum()
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| (entry.elements * element_bytes(entry.dtype)) as u64).sum()
    }

    /// Digest of names, types and shapes, whatever their order, and of what is done with them.
    #[must_use]
    pub fn digest(&self, reduction: &str) -> String {
        let mut lines: Vec<String> =
            self.entries.iter().map(|e| format!("{:?} {:?} {:?}", e.name, e.dtype, e.shape)).collect();
        lines.sort_unstable();
        let mut hash = Sha256::new();
        hash.update(reduction);
        for line in lines {
            hash.update("\n");
            hash.update(line);
        }
        hex(&hash.finalize())
    }

    /// Indices in the order in which ranks reduce: by name, for files of different ranks may be in different order.
    fn by_name(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.entries.len()).collect();
        order.sort_by_key(|index| self.entries.get(*index).map(|entry| entry.name.as_str()));
        order
    }
}

/// Bytes of one element of a type that [`read`] lets through.
const fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F16 | Dtype::BF16 => 2,
        _ => 4,
    }
}

/// Reads a file: its layout, and its tensors in the order of their names.
///
/// # Errors
/// If it cannot be read, is no safetensors file, or holds a type that cannot be reduced.
pub fn read(path: &Path) -> Result<(Layout, Vec<Tensor>), TensorError> {
    let unreadable = |source| TensorError::Read { path: path.into(), source };
    let file = File::open(path).map_err(unreadable)?;
    let length = file.metadata().map_err(unreadable)?.len();
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let layout = read_layout(path, &mut reader, length)?;
    let mut values = Vec::with_capacity(layout.entries.len());
    for entry in &layout.entries {
        values.push(Some(read_values(&mut reader, entry).map_err(unreadable)?));
    }
    let mut tensors = Vec::with_capacity(values.len());
    for index in layout.by_name() {
        if let (Some(entry), Some(values)) =
            (layout.entries.get(index), values.get_mut(index).and_then(Option::take))
        {
            tensors.push(Tensor { name: entry.name.clone(), values });
        }
    }
    Ok((layout, tensors))
}

fn read_layout(path: &Path, reader: &mut impl Read, length: u64) -> Result<Layout, TensorError> {
    let unreadable = |source| TensorError::Read { path: path.into(), source };
    let bad = |detail: String| TensorError::Format { path: path.into(), detail };
    let mut size = [0; LENGTH_BYTES];
    if length < LENGTH_BYTES as u64 {
        return Err(bad(format!("it has only {length} bytes")));
    }
    reader.read_exact(&mut size).map_err(unreadable)?;
    let json_bytes = u64::from_le_bytes(size);
    if json_bytes > MAX_HEADER_BYTES || json_bytes > length - LENGTH_BYTES as u64 {
        return Err(bad(format!("its header claims {json_bytes} bytes, the file has {length}")));
    }
    let mut header = size.to_vec();
    // Fits: at most MAX_HEADER_BYTES.
    header.resize(LENGTH_BYTES + json_bytes as usize, 0);
    let json = header.get_mut(LENGTH_BYTES..).unwrap_or_default();
    reader.read_exact(json).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
    let data = metadata.data_len() as u64;
    let whole = data.checked_add(header.len() as u64);
    if whole != Some(length) {
        return Err(bad(format!(
            "its tensors have {data} bytes after a header of {}, the file has {length}",
            header.len()
        )));
    }
    let mut entries = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::I32) {
            return Err(TensorError::Type { path: path.into(), tensor: name, dtype: info.dtype });
        }
        // The product was checked when the header was parsed.
        let elements = info.shape.iter().product();
        entries.push(Entry { name, dtype: info.dtype, shape: info.shape.clone(), elements });
    }
    Ok(Layout { header, entries })
}

fn read_values(reader: &mut impl Read, entry: &Entry) -> io::Result<Values> {
    Ok(match entry.dtype {
        Dtype::F16 => Values::F16(read_vec(reader, entry.elements, |bytes| f16::from_le_bytes(*bytes))?),
        Dtype::BF16 => Values::Bf16(read_vec(reader, entry.elements, |bytes| bf16::from_le_bytes(*bytes))?),
        Dtype::I32 => Values::I32(read_vec(reader, entry.elements, |bytes| i32::from_le_bytes(*bytes))?),
        _ => Values::F32(read_vec(reader, entry.elements, |bytes| f32::from_le_bytes(*bytes))?),
    })
}

/// Bytes that are converted at once.
const BLOCK_BYTES: usize = 64 << 10;

fn read_vec<T, const N: usize>(
    reader: &mut impl Read,
    elements: usize,
    convert: impl Fn(&[u8; N]) -> T,
) -> io::Result<Vec<T>> {
    let mut values = Vec::with_capacity(elements);
    let mut block = vec![0; BLOCK_BYTES];
    let mut left = elements;
    while left > 0 {
        let count = left.min(BLOCK_BYTES / N);
        let bytes = block.get_mut(..count * N).unwrap_or_default();
        reader.read_exact(bytes)?;
        let (chunks, _) = bytes.as_chunks();
        values.extend(chunks.iter().map(&convert));
        left -= count;
    }
    Ok(values)
}

/// A file that appears under its name only once it is whole.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    /// Where it is written, in the same folder.
    temporary: PathBuf,
}

impl Output {
    /// Tries whether a file can be made beside the one to be, so that a missing folder shows before the work. Nothing is
    /// left there until the work is done, however the process ends.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn create(path: &Path) -> Result<Output, TensorError> {
        let failed = |source| TensorError::Write { path: path.into(), source };
        let Some(name) = path.file_name() else {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it names no file")));
        };
        if path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".paatp-{}", std::process::id()));
        let temporary = path.with_file_name(hidden);
        File::create(&temporary).and_then(|_| std::fs::remove_file(&temporary)).map_err(failed)?;
        Ok(Output { path: path.into(), temporary })
    }

    /// Writes a result and gives the file its name. Returns the SHA-256 of all tensors' bytes in the file's order.
    ///
    /// # Errors
    /// If the tensors are not the layout's, or the file cannot be written; the named file is untouched then.
    pub fn finish(self, layout: &Layout, tensors: &[Tensor]) -> Result<String, TensorError> {
        let order = layout.by_name();
        if order.len() != tensors.len() {
            return Err(TensorError::Shape(format!("{} instead of {}", tensors.len(), order.len())));
        }
        let mut results = vec![None; tensors.len()];
        for (index, tensor) in order.into_iter().zip(tensors) {
            check_entry(layout.entries.get(index), tensor)?;
            if let Some(place) = results.get_mut(index) {
                *place = Some(tensor);
            }
        }
        let written = self.write(layout, &results).and_then(|hash| {
            std::fs::rename(&self.temporary, &self.path)?;
            Ok(hash)
        });
        written.map_err(|source| {
            // It may not even be there; what matters is the first error.
            let _ = std::fs::remove_file(&self.temporary);
            TensorError::Write { path: self.path, source }
        })
    }

    /// Writes header and tensors to the temporary file; returns the hash of the tensors.
    fn write(&self, layout: &Layout, results: &[Option<&Tensor>]) -> io::Result<String> {
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(&self.temporary)?);
        let mut hash = Sha256::new();
        writer.write_all(&layout.header)?;
        for tensor in results.iter().flatten() {
            write_values(&mut writer, &mut hash, &tensor.values)?;
        }
        writer.flush()?;
        Ok(hex(&hash.finalize()))
    }
}

fn check_entry(entry: Option<&Entry>, tensor: &Tensor) -> Result<(), TensorError> {
    let (dtype, elements) = match &tensor.values {
        Values::F32(values) => (Dtype::F32, values.len()),
        Values::F16(values) => (Dtype::F16, values.len()),
        Values::Bf16(values) => (Dtype::BF16, values.len()),
        Values::I32(values) => (Dtype::I32, values.len()),
    };
    match entry {
        Some(entry) if entry.name == tensor.name && entry.dtype == dtype && entry.elements == elements => {
            Ok(())
        }
        _ => Err(TensorError::Shape(format!("`{}` has {elements} elements of {dtype:?}", tensor.name))),
    }
}

fn write_values(writer: &mut impl Write, hash: &mut Sha256, values: &Values) -> io::Result<()> {
    match values {
        Values::F32(values) => write_slice(writer, hash, values, |value| value.to_le_bytes()),
        Values::F16(values) => write_slice(writer, hash, values, |value| value.to_le_bytes()),
        Values::Bf16(values) => write_slice(writer, hash, values, |value| value.to_le_bytes()),
        Values::I32(values) => write_slice(writer, hash, values, |value| value.to_le_bytes()),
    }
}

fn write_slice<T: Copy, const N: usize>(
    writer: &mut impl Write,
    hash: &mut Sha256,
    values: &[T],
    convert: impl Fn(T) -> [u8; N],
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    for block in values.chunks(BLOCK_BYTES / N) {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|value| convert(*value)));
        hash.update(&bytes);
        writer.write_all(&bytes)?;
    }
    Ok(())
}

/// Bytes in hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[path = "tensors_tests.rs"]
mod tests;
