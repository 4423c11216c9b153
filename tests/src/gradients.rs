//! Gradients: the bundled real ones, synthetic ones, and reading and writing them as safetensors files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};

/// Type of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 32-bit two's complement.
    I32,
    /// IEEE 754 binary64: reference sums only.
    F64,
}

impl Dtype {
    /// The types that can be reduced.
    pub const REDUCIBLE: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I32];

    /// Bytes of one value.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Bits of the significand, the implicit one included, and the exponent of the smallest subnormal; `None` for
    /// integers.
    #[must_use]
    pub const fn precision(self) -> Option<(i32, i32)> {
        match self {
            Dtype::F64 => Some((53, -1074)),
            Dtype::F32 => Some((24, -149)),
            Dtype::F16 => Some((11, -24)),
            Dtype::Bf16 => Some((8, -133)),
            Dtype::I32 => None,
        }
    }

    const fn in_file(self) -> safetensors::Dtype {
        match self {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
            Dtype::I32 => safetensors::Dtype::I32,
            Dtype::F64 => safetensors::Dtype::F64,
        }
    }

    fn from_file(dtype: safetensors::Dtype) -> Result<Dtype> {
        Ok(match dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::I32 => Dtype::I32,
            safetensors::Dtype::F64 => Dtype::F64,
            other => bail!("values of type {other:?} are not supported"),
        })
    }
}

/// A named tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Type of its values.
    pub dtype: Dtype,
    /// Its values, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A vector of values, rounded to the type.
    #[must_use]
    pub fn new(name: impl Into<String>, dtype: Dtype, values: &[f64]) -> Tensor {
        let mut bytes = Vec::with_capacity(values.len() * dtype.bytes());
        for value in values {
            match dtype {
                Dtype::F32 => bytes.extend((*value as f32).to_le_bytes()),
                Dtype::F16 => bytes.extend(f16::from_f64(*value).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(bf16::from_f64(*value).to_le_bytes()),
                Dtype::I32 => bytes.extend((*value as i32).to_le_bytes()),
                Dtype::F64 => bytes.extend(value.to_le_bytes()),
            }
        }
        Tensor { name: name.into(), shape: vec![values.len()], dtype, bytes }
    }

    /// The values; exact, whatever the type.
    #[must_use]
    pub fn values(&self) -> Vec<f64> {
        fn all<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| value(*bytes)).collect()
        }
        match self.dtype {
            Dtype::F32 => all(&self.bytes, |bytes| f32::from_le_bytes(bytes).into()),
            Dtype::F16 => all(&self.bytes, |bytes| f16::from_le_bytes(bytes).to_f64()),
            Dtype::Bf16 => all(&self.bytes, |bytes| bf16::from_le_bytes(bytes).to_f64()),
            Dtype::I32 => all(&self.bytes, |bytes| i32::from_le_bytes(bytes).into()),
            Dtype::F64 => all(&self.bytes, f64::from_le_bytes),
        }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// It has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// The tensors of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gradient {
    /// In the file's order.
    pub tensors: Vec<Tensor>,
}

impl Gradient {
    /// Reads a safetensors file.
    ///
    /// # Errors
    /// Where it cannot be read or is none.
    pub fn read(path: &Path) -> Result<Gradient> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = SafeTensors::deserialize(&bytes)
            .with_context(|| format!("{} is no safetensors file", path.display()))?;
        // In the order of their bytes: that of the names in memory is random.
        let mut views = file.tensors();
        views.sort_by_key(|(_, view)| view.data().as_ptr());
        let tensors = views
            .into_iter()
            .map(|(name, view)| {
                let dtype =
                    Dtype::from_file(view.dtype()).with_context(|| format!("{}: {name}", path.display()))?;
                Ok(Tensor { name, shape: view.shape().to_vec(), dtype, bytes: view.data().to_vec() })
            })
            .collect::<Result<_>>()?;
        Ok(Gradient { tensors })
    }

    /// Writes a safetensors file.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let views = self.tensors.iter().map(|tensor| {
            TensorView::new(tensor.dtype.in_file(), tensor.shape.clone(), &tensor.bytes)
                .map(|view| (tensor.name.as_str(), view))
        });
        let views: Vec<_> = views.collect::<Result<_, _>>()?;
        safetensors::serialize_to_file(views, None, path)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// A tensor by its name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// SHA-256 over names, types, shapes and values, in the order of the names.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut sorted: Vec<_> = self.tensors.iter().collect();
        sorted.sort_by_key(|tensor| &tensor.name);
        let mut hash = Sha256::new();
        for tensor in sorted {
            hash.update(format!("{:?} {:?} {:?}\n", tensor.name, tensor.dtype, tensor.shape));
            hash.update(&tensor.bytes);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Bytes of all values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes.len()).sum()
    }
}

/// Folder of the bundled real gradients.
#[must_use]
pub fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/digits-cnn")
}

/// The bundled gradients of a step (0 or 1), of ranks 0 to `world` − 1 (at most 8).
///
/// # Errors
/// Where there are not as many.
pub fn real(step: u32, world: usize) -> Result<Vec<Gradient>> {
    let files = rank_files(&bundled(), step)?;
    ensure!(world <= files.len(), "the bundled gradients have {} ranks, not {world}", files.len());
    files[..world].iter().map(|path| Gradient::read(path)).collect()
}

/// The files of a folder whose names end in `rankR.safetensors`, by rank from 0 on. If there are several for a rank,
/// those with `stepS` in their names are meant.
///
/// # Errors
/// Where ranks are missing or the choice is not clear.
pub fn rank_files(folder: &Path, step: u32) -> Result<Vec<PathBuf>> {
    let mut by_rank: BTreeMap<usize, Vec<PathBuf>> = BTreeMap::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list the gradients in {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let rank = path.file_name().and_then(|name| rank_of(name.to_str()?));
        if let Some(rank) = rank {
            by_rank.entry(rank).or_default().push(path);
        }
    }
    ensure!(
        !by_rank.is_empty(),
        "no file in {} has a name that ends in rankR.safetensors, for example step0-rank0.safetensors",
        folder.display()
    );
    let wanted = format!("step{step}");
    let mut files = Vec::new();
    for (index, (rank, mut candidates)) in by_rank.into_iter().enumerate() {
        ensure!(
            rank == index,
            "there is a file for rank {rank} in {}, but none for rank {index}",
            folder.display()
        );
        if candidates.len() > 1 {
            candidates.retain(|path| has_word(path, &wanted));
        }
        match candidates.as_slice() {
            [one] => files.push(one.clone()),
            [] => bail!("no file for rank {rank} in {} has {wanted} in its name", folder.display()),
            _ => bail!("several files for rank {rank} in {} have {wanted} in their names", folder.display()),
        }
    }
    Ok(files)
}

/// R of a name that ends in `rankR.safetensors`.
fn rank_of(name: &str) -> Option<usize> {
    let stem = name.strip_suffix(".safetensors")?;
    let digits = stem.len() - stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (head, number) = stem.split_at(stem.len() - digits);
    head.ends_with("rank").then(|| number.parse().ok())?
}

/// `word` is in the file's name, and no digit follows it.
fn has_word(path: &Path, word: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.match_indices(word).any(|(at, _)| !name[at + word.len()..].starts_with(|c: char| c.is_ascii_digit()))
}

/// Random values that are the same whenever they are made (splitmix64, public domain).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Evenly between −1 and 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Synthetic gradients: one for each rank, with tensors of these types and lengths, named `t0`, `t1`…, values evenly
/// between −`scale` and `scale`.
#[must_use]
pub fn synthetic(world: usize, seed: u64, tensors: &[(Dtype, usize)], scale: f64) -> Vec<Gradient> {
    (0..world)
        .map(|rank| {
            let mut random = Random(seed ^ (rank as u64) << 32);
            let tensors = tensors.iter().enumerate().map(|(number, (dtype, length))| {
                let values: Vec<f64> = (0..*length).map(|_| random.unit() * scale).collect();
                Tensor::new(format!("t{number}"), *dtype, &values)
            });
            Gradient { tensors: tensors.collect() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use super::*;

    #[test]
    fn bundled_gradients_are_complete_and_their_sums_right() {
        for step in 0..2 {
            let ranks = real(step, 8).unwrap();
            let sum = Gradient::read(&bundled().join(format!("step{step}-sum-f64.safetensors"))).unwrap();
            assert_eq!(ranks[0].tensors.len(), 8);
            assert_eq!(ranks[0].tensors.iter().map(Tensor::len).sum::<usize>(), 55_018);
            let ours = crate::reference::reduce(&ranks, crate::reference::Reduction::Sum).unwrap();
            for (name, values) in ours {
                assert_eq!(values, sum.tensor(&name).unwrap().values(), "{name}");
            }
        }
    }

    #[test]
    fn files_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let lengths: Vec<_> = Dtype::REDUCIBLE.iter().flat_map(|dtype| [(*dtype, 5), (*dtype, 0)]).collect();
        for (rank, gradient) in synthetic(2, 7, &lengths, 100.0).iter().enumerate() {
            let path = folder.path().join(format!("x-rank{rank}.safetensors"));
            gradient.write(&path).unwrap();
            let back = Gradient::read(&path).unwrap();
            assert_eq!(back.digest(), gradient.digest());
            assert_eq!(back.tensor("t0").unwrap(), &gradient.tensors[0]);
        }
        assert_eq!(rank_files(folder.path(), 0).unwrap().len(), 2);
    }

    #[test]
    fn ranks_are_found_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let touch = |name: &str| fs::write(folder.path().join(name), "").unwrap();
        let complaint = |step| rank_files(folder.path(), step).unwrap_err().to_string();
        assert!(complaint(0).contains("rankR.safetensors"));
        touch("step1-rank1.safetensors");
        assert!(complaint(0).contains("none for rank 0"));
        touch("step1-rank0.safetensors");
        touch("step10-rank0.safetensors");
        touch("step1-sum.safetensors");
        let names = rank_files(folder.path(), 1).unwrap();
        assert!(
            names[0].ends_with("step1-rank0.safetensors") && names[1].ends_with("step1-rank1.safetensors")
        );
        assert!(complaint(2).contains("step2"));
    }
}
