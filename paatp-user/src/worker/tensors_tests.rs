//! Files there and back, and files that are none.

use super::*;
use safetensors::tensor::{TensorView, serialize};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A file with all types, odd lengths, an empty tensor and a scalar, and metadata.
fn sample(path: &Path) -> Vec<u8> {
    let (f32s, f16s) = (bytes(&[1.5, -2.0, f32::MIN_POSITIVE]), [0, 0x3c, 1, 0x3c, 2, 0x3c]);
    let i32s: Vec<u8> = [7i32, -7, i32::MAX].iter().flat_map(|value| value.to_le_bytes()).collect();
    let scalar = bytes(&[9.0]);
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data);
    let tensors = [
        ("z.weight", view(Dtype::F32, &[3], f32s.as_slice())),
        ("a", view(Dtype::F16, &[1, 3], f16s.as_slice())),
        ("m.bf", view(Dtype::BF16, &[3, 1], f16s.as_slice())),
        ("count", view(Dtype::I32, &[3], i32s.as_slice())),
        ("empty", view(Dtype::F32, &[0, 5], &[])),
        ("scalar", view(Dtype::F32, &[], scalar.as_slice())),
    ];
    let tensors = tensors.into_iter().filter_map(|(name, view)| Some((name.to_owned(), view.ok()?)));
    let info = std::collections::HashMap::from([("step".to_owned(), "12".to_owned())]);
    let all = serialize(tensors, Some(info)).unwrap_or_else(|error| panic!("{error}"));
    assert!(std::fs::write(path, &all).is_ok());
    all
}

#[test]
fn files_survive_the_round_trip_byte_for_byte() {
    let folder = folder();
    let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let original = sample(&input);
    let (layout, tensors) = read(&input).unwrap_or_else(|error| panic!("{error}"));
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "count", "empty", "m.bf", "scalar", "z.weight"]);
    assert_eq!((layout.tensors(), layout.elements(), layout.bytes()), (6, 13, 12 + 6 + 6 + 12 + 4));
    let hash = Output::create(&output).and_then(|output| output.finish(&layout, &tensors));
    let data = original.get(layout.header.len()..).unwrap_or_default();
    assert_eq!(hash.ok(), Some(hex(&Sha256::digest(data))));
    assert_eq!(std::fs::read(&output).ok(), Some(original));
    let left: Vec<_> = std::fs::read_dir(folder.path()).into_iter().flatten().collect();
    assert_eq!(left.len(), 2, "the temporary file is gone");
}

#[test]
fn long_tensors_cross_the_blocks() {
    let folder = folder();
    let path = folder.path().join("long");
    let values: Vec<f32> = (0..100_003u32).map(|i| i as f32).collect();
    let data = bytes(&values);
    let view = TensorView::new(Dtype::F32, vec![values.len()], &data);
    let all = view.and_then(|view| serialize([("w", view)], None)).unwrap_or_default();
    assert!(std::fs::write(&path, &all).is_ok());
    let (layout, tensors) = read(&path).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(tensors.first().map(|tensor| tensor.values.clone()), Some(Values::F32(values)));
    assert!(Output::create(&path).and_then(|output| output.finish(&layout, &tensors)).is_ok());
    assert_eq!(std::fs::read(&path).ok(), Some(all));
}

#[test]
fn files_without_tensors_are_fine() {
    let folder = folder();
    let path = folder.path().join("none");
    let all = serialize(Vec::<(String, TensorView<'_>)>::new(), None).unwrap_or_default();
    assert!(std::fs::write(&path, &all).is_ok());
    let (layout, tensors) = read(&path).unwrap_or_else(|error| panic!("{error}"));
    assert!(tensors.is_empty());
    assert!(Output::create(&path).and_then(|output| output.finish(&layout, &tensors)).is_ok());
    assert_eq!(std::fs::read(&path).ok(), Some(all));
}

#[test]
fn failed_runs_leave_nothing() {
    let folder = folder();
    let path = folder.path().join("out");
    assert!(std::fs::write(&path, "before").is_ok());
    let input = folder.path().join("in");
    sample(&input);
    let Ok((layout, mut tensors)) = read(&input) else { panic!("unreadable") };
    let Ok(output) = Output::create(&path) else { panic!("not created") };
    drop(output);
    tensors.pop();
    let wrong = Output::create(&path).and_then(|output| output.finish(&layout, &tensors));
    assert!(matches!(wrong, Err(TensorError::Shape(_))));
    assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), Some("before"));
    assert_eq!(std::fs::read_dir(folder.path()).into_iter().flatten().count(), 2);
}

#[test]
fn places_that_cannot_be_written_show_at_once() {
    let folder = folder();
    for path in [folder.path().join("no/such/out"), folder.path().to_path_buf(), PathBuf::from("/")] {
        let error = Output::create(&path).map(drop).map_err(|error| error.to_string());
        assert!(error.is_err_and(|message| message.contains("cannot write")), "{path:?}");
    }
}

#[test]
fn other_types_are_named() {
    let folder = folder();
    let path = folder.path().join("in");
    let view = TensorView::new(Dtype::F64, vec![1], &[0; 8]);
    let all = view.and_then(|view| serialize([("w", view)], None)).unwrap_or_default();
    assert!(std::fs::write(&path, all).is_ok());
    let message = read(&path).map(drop).map_err(|error| error.to_string()).err().unwrap_or_default();
    assert!(["`w`", "F64", "F32, F16, BF16 and I32"].iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn files_that_are_none_are_refused() {
    let folder = folder();
    let path = folder.path().join("in");
    let good = sample(&path);
    let mut cases: Vec<Vec<u8>> = (0..good.len()).step_by(7).map(|cut| good[..cut].to_vec()).collect();
    cases.push([good.as_slice(), b"x"].concat());
    cases.push(u64::MAX.to_le_bytes().to_vec());
    cases.push([8u64.to_le_bytes().as_slice(), b"{\"a\":[]}"].concat());
    cases.push([2u64.to_le_bytes().as_slice(), &[0xff, 0xfe]].concat());
    for case in cases {
        assert!(std::fs::write(&path, &case).is_ok());
        assert!(matches!(read(&path), Err(TensorError::Format { .. })), "{} bytes", case.len());
    }
    assert!(matches!(read(Path::new("/nonexistent/in")), Err(TensorError::Read { .. })));
}

#[test]
fn digests_see_names_types_shapes_and_reduction_but_no_order() {
    let entry = |name: &str, dtype, shape: &[usize]| Entry {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        elements: shape.iter().product(),
    };
    let digest = |entries: &[Entry], reduction| {
        Layout { header: Vec::new(), entries: entries.to_vec() }.digest(reduction)
    };
    let (a, b) = (entry("a", Dtype::F32, &[2, 3]), entry("b", Dtype::F16, &[1]));
    let base = digest(&[a.clone(), b.clone()], "sum");
    assert_eq!(base, digest(&[b.clone(), a.clone()], "sum"));
    assert_eq!(base.len(), 64);
    for other in [
        digest(&[a.clone(), b.clone()], "mean"),
        digest(&[entry("a", Dtype::F32, &[3, 2]), b.clone()], "sum"),
        digest(&[entry("a", Dtype::I32, &[2, 3]), b.clone()], "sum"),
        digest(&[entry("c", Dtype::F32, &[2, 3]), b], "sum"),
        digest(&[a], "sum"),
    ] {
        assert_ne!(base, other);
    }
}
